# Other libraries probe for a package named `kernels`: keep this file free of imports, with a low version.
__version__ = "0.0.1"
