"""Stand-ins for the outside: a pack whose faults can be switched on one by one."""
