"""How dates are printed, by language. Django reads them by ``FORMAT_MODULE_PATH``."""
