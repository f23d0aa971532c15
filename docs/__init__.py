"""What the package documents of itself: a page for each error code, printed by `meshplan explain-error`."""
