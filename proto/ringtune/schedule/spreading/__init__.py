"""How operations are spread over the micro-batches of a course, before and besides all scores."""
