"""From a workload on a device to the config that serves it: the ladder, its records, and why it answered so."""
