"""LoRA adapters (Hu et al., arXiv 2106.09685): PEFT's folders, and low-rank updates of linear layers."""

from inlay.models.lora.layers import Adapters
from inlay.models.lora.load import Adapter, AdapterInfo, check_names, load_adapter, load_adapters, size_of

__all__ = ["Adapter", "AdapterInfo", "Adapters", "check_names", "load_adapter", "load_adapters", "size_of"]
