"""Embeddings in OpenAI's form, and reranking in Cohere's and Jina's, without HTTP.

``bodies`` declares and reads the requests. ``answers`` makes a call of each, and writes its response.
"""

from inlay.api.call import AnswerRoute, Call
from inlay.api.embeddings.answers import respond, stream, translate
from inlay.api.embeddings.bodies import ROUTES, Endpoint, components, read_body
from inlay.api.openai.respond import error_body, limit_headers

__all__ = ["Embeddings", "Endpoint", "is_embedding"]


def is_embedding(call: Call) -> bool:
    """True if a call asks for embeddings, or for a ranking by them."""
    return call.params.pooling is not None


class Embeddings:
    """The dialect of embeddings: see ``inlay.api.dialect.Dialect``. Its errors are OpenAI's."""

    routes: tuple[AnswerRoute, ...] = ROUTES
    components = staticmethod(components)
    read = staticmethod(read_body)
    translate = staticmethod(translate)
    respond = staticmethod(respond)
    stream = staticmethod(stream)
    error_body = staticmethod(error_body)
    limit_headers = staticmethod(limit_headers)
