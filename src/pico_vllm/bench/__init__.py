"""Measuring engines: workloads, adapters, one clock, records, reports. See docs/benchmarks.md."""
