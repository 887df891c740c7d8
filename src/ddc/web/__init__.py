"""The web page. `server` runs it, `page` lays it out with Gradio, and `service` does the work behind it."""
