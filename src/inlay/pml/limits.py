"""How large a schema or a prompt may be: hostile input is refused early, in bounded time and memory."""

MAX_BYTES = 16 * 2**20  # of one file or string, as UTF-8
MAX_SOURCE_BYTES = 64 * 2**20  # of all the files that one schema names in src, together
MAX_DEPTH = 32  # elements inside elements, the outermost one counted
MAX_ELEMENTS = 100_000
MAX_ATTRIBUTES = 1_000  # of one element
MAX_ATTRIBUTE_CHARACTERS = 2**20  # of one attribute's value
MAX_NAME_CHARACTERS = 256
MAX_PARAM_LENGTH = 1_000_000  # tokens
MAX_PROBLEMS = 20  # that one error shows
