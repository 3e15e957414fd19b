"""The doors: one folder per protocol, each a sans-IO codec and a thin ASGI adapter."""

if __name__ == "protocols":
    raise ImportError("import omni_live.protocols: the folder protocols/ is shipped as a part of the package omni_live")
