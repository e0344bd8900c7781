"""Static analysis of one Python file: the facts that rules read, through `file.Facts` only.

    syntax/     the index of the file: scopes, bindings, calls and their path conditions, without name resolution
    program/    abstract values of expressions, the call graph, the names of library APIs
    behaviour/  what happens: events, data flow, regions, dtypes of tensors, traces of operations on scaled gradients
    domain/     what training code does: wrappers, trained weights, checkpoints, FP8, configs

A layer imports only itself and the layers before it.

A rule gets a `Facts` and imports the types of its results from `mpguard.lint`:

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for cast in facts.events("cast"):
            if cast.may_be(Dtype.FP16) and not facts.is_inference(cast.call):
                yield self.at(cast)

Terms. A *record* is a syntactic occurrence: a binding, a use, a call, a `with` item. Its *path condition* (`guard`) is
the conjunction of the conditions over flags under which it is executed; two records belong to one run only if their
path conditions are `compatible`. The *abstract value* of an expression is a tuple of alternatives, each with its own
path condition; `UNKNOWN` is the top element, and rules do not report it. A *region* is a context (`with` item or
decorator) around a record. An *event* is a record of a kind that rules are about.
"""

# Before any module imports libcst: this import of it is faster.
from mpguard.lint.source import libcst_internals as libcst_internals
