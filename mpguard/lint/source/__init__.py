"""The files of a run and their source: collecting, decoding, splitting into statements, parsing with libcst."""
