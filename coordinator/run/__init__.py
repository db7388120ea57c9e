"""Control of a run or a measurement: plan it, call its nodes, checkpoint, recover, and record it."""
