"""One package per ecosystem: parse, edit and show metadata documents. Nothing here reads a store."""
