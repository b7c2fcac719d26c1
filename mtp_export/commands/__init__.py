"""Commands of the program, one file each: its options, its call into the core, its table."""
