"""Several ranks compute one model: which part each holds, how they add up, who tells them what to do."""
