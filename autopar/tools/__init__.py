"""Tools around the compiler: benchmarks, calibration, the demo, and checks of rules."""
