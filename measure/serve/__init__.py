"""`hackkv bench serve`: a load generator for any OpenAI-style server, with the stages of ours."""
