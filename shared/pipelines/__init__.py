"""Built-in pipelines, one file a task, loaded by name."""
