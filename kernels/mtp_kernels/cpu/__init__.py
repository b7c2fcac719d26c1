"""Compiled CPU code that several kernels share: vectors, threads, memory."""
