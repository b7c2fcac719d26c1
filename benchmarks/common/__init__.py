"""Parts that several benchmarks share: measurement, limits, peers, shapes."""
