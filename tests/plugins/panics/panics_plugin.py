"""A plugin module that raises what is no Exception, as a Rust extension's panic does."""


class PanicException(BaseException):
    pass


raise PanicException("called `Option::unwrap()` on a `None` value")
