"""Look at somebody's rows and model, and write the job that follows from them; nothing here loads torch."""
