"""Every figure in the documents, printed."""
