"""The report: plain HTML pages, one style sheet and one script, which a browser opens from disk."""
