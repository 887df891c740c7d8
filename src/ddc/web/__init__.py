"""The web page: `service` does what is asked, in plain functions; `page` shows it, with Gradio."""
