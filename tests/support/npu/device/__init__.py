"""A device of type "npu" in plain torch, for a whole engine in a process of its own.

`torch_npu` (in `stand_in/`) calls `install.install` when it is imported; `process.npu_environment` makes the
environment in which it is found. From then on, in that process and for good:

- `torch.device("npu", 0)` is a device: tensors on it carry their values on the CPU (`tensor.py`). Every operation on
  them goes through `tensor.dispatch`, which refuses to mix them with tensors of the CPU, counts their memory
  (`memory.py`) and raises "NPU out of memory. Tried to allocate …" as torch_npu words it;
- what torch's own operations may not do on the chip, by the vendor's sources, is refused (`torch_rules.py`): tensors in
  format NZ, and on a 310P products of float32 matrices, and anything while jit_compile is on;
- `torch.ops.npu.*` and `torch.ops.atb.*` are the emulated operators, `torch_npu.npu_*`, `torch_npu._npu_*` their names;
- `torch.npu` (`runtime.py`): is_available, device_count, current_device, set_device, set_compile_mode,
  get_device_name, synchronize, mem_get_info, memory_allocated, memory_reserved, max_memory_allocated,
  reset_peak_memory_stats, empty_cache, Stream, current_stream, stream, Event, ExternalEvent, NPUGraph, graph,
  graph_task_group_begin/end, graph_task_update_begin/end, OutOfMemoryError;
- a captured graph (`graphs.py`) behaves as on the hardware: nothing is computed while it is captured, replay reads and
  writes the captured addresses, host arguments (lengths) stay as captured unless their task group is updated, and what
  would wait for the device during capture fails.

The processes of one test share no memory: what another engine has taken is said by the environment.
"""
