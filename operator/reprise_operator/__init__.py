"""Reprise operator: reconciles InferenceService (serving.reprise.io/v1alpha1) into pods of a prefix-caching engine."""

__version__ = "0.1.0"
