"""From bodies of requests to calls, and from outputs to bodies of responses, without HTTP.

call: a request for answers, in no API's words. failures: what went wrong, likewise. values: what bodies may hold.
tools: how models write calls of tools; reasoning: what they think. dialect: what an API puts around these, and which
one speaks at which path; openai: OpenAI's.
"""
