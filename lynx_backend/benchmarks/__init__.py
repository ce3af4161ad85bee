"""Benchmarks that users can run: what ``lynx bench`` measures. Not part of the library's API."""
