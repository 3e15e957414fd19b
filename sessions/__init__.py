"""The pure session core: inputs and the time come in, effects go out. Standard library only."""

if __name__ == "sessions":
    raise ImportError("import omni_live.sessions: the folder sessions/ is shipped as a part of the package omni_live")
