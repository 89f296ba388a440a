"""On PYTHONPATH this folder has the `torch_npu` of an emulated NPU."""
