"""The command line: `kvconnector plan`, `doctor`, `bench`, `keygen` and `version`."""
