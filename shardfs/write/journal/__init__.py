"""The journal: acknowledged writes that are not yet in the store, kept on a local disk (docs/durability.md)."""

from shardfs.write.journal.log import Journal as Journal
from shardfs.write.journal.reading import Reading as Reading
from shardfs.write.journal.records import Position as Position
from shardfs.write.journal.records import Record as Record
from shardfs.write.journal.records import RecordKind as RecordKind
