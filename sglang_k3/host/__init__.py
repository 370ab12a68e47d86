"""This package's objects in SGLang's shapes: thin, each calls ring 1."""
