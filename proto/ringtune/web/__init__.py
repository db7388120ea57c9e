"""Who may look at a process's pages and figures: rules without a socket, for the coordinator and for agents."""
