"""What everything stands on: settings, locks, warnings, and the private names of PyTorch."""
