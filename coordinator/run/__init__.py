"""Control of a run or a measurement: plan, calls to nodes, checkpoints, recovery, records."""
