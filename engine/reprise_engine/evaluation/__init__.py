"""Whether the cache changes what a model says: `reprise eval`. In this process, against plain `transformers`."""
