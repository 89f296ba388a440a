"""Brings a model onto a volume before an engine starts: `reprise fetch`. Free of torch.

uri → source.list() → what of it is wanted → each file: resume, verify, put in place → marked complete
"""
