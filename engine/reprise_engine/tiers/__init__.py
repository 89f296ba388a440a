"""Where evicted KV goes, and comes back from: host memory and disk. Free of torch."""
