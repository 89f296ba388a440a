"""The OpenAI-compatible HTTP server of the API process, free of torch; see `app.create_app` and `start.run`."""
