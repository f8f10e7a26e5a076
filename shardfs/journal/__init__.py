"""The journal: what was acknowledged and is not yet in the store, on a local disk (docs/durability.md)."""

from shardfs.journal.log import Journal as Journal
from shardfs.journal.peek import Peek as Peek
from shardfs.journal.places import directory_for as directory_for
from shardfs.journal.places import state_directory as state_directory
from shardfs.journal.records import Kind as Kind
from shardfs.journal.records import Position as Position
from shardfs.journal.records import Record as Record
