"""Pipeline parallelism: partition, schedule, state. Internal."""
