"""An example: an HTTP server with OpenAI's protocol on one `kv.Engine`, and a page that shows its blocks."""
