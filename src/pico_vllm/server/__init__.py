"""OpenAI's formats: what a request's body means, and what an answer looks like. No sockets here yet."""
