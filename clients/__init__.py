"""Reference clients and the client library. They import codecs, never the server."""

if __name__ == "clients":
    raise ImportError("import omni_live.clients: the folder clients/ is shipped as a part of the package omni_live")
