"""Lets vLLM import its models of images beside a torch without CUDA: torchvision of the package
index has operators for CUDA alone, and fails where it describes them."""

import sys
from types import ModuleType

_DESCRIPTIONS = "torchvision._meta_registrations"
sys.modules[_DESCRIPTIONS] = ModuleType(_DESCRIPTIONS)
