"""quant_methods of checkpoints that others quantized, one file each: how a config is read, and how
it is told to leave modules unquantized. Names follow vLLM's and SGLang's resolvers."""
