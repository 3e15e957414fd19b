"""The server on its port: HTTP, the doors' websockets, who may come in, who gets a session, and the end of it all."""
