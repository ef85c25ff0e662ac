//! The file of one identity: opened, looked up in, appended to.

use super::entry::{self, Entries, Place};
use super::{Identity, Key};
use crate::corpus::tokens::Tokens;
use crate::mapped::release_pages;
use crate::run::atomic::make_beside;
use bytes::Bytes;
use memmap2::{Mmap, MmapOptions};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file's pages are given back after so much of it has been looked through.
const WINDOW_BYTES: usize = 64 << 20;

/// The encodings of one [`Identity`].
pub struct EncodingsFile {
    path: PathBuf,
    first_line: String,
    /// The file, open for appending, or why it cannot be written.
    file: io::Result<File>,
    /// What has been seen of it: what was there, then each piece that was appended.
    parts: Vec<Part>,
    seen_bytes: u64,
    /// Where the entry of a record begins, counted through all parts.
    index: HashMap<Key, u64>,
    damaged_bytes: usize,
}

impl EncodingsFile {
    /// The file in `folder`, made where it is not there. One that cannot be used is empty, and [`Self::unwritable`] says
    /// why: it costs time and nothing else.
    pub fn open(folder: &Path, identity: &Identity) -> Self {
        let path = folder.join(identity.file_name());
        let mut this = Self {
            path,
            first_line: identity.line(),
            file: Err(io::ErrorKind::NotFound.into()),
            parts: Vec::new(),
            seen_bytes: 0,
            index: HashMap::new(),
            damaged_bytes: 0,
        };
        this.file = this.open_to_append(folder);
        if this.file.is_err() && this.parts.is_empty() {
            // what can be read is of use all the same; where nothing can, that is why it cannot be written either
            _ = File::open(&this.path).and_then(|file| file.lock_shared().and_then(|()| this.read_on(&file)));
        }
        this
    }

    fn open_to_append(&mut self, folder: &Path) -> io::Result<File> {
        fs::create_dir_all(folder)?;
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&self.path)?;
        file.lock()?;
        if file.metadata()?.len() == 0 {
            file.write_all(self.first_line.as_bytes())?;
        }
        self.read_on(&file)?;
        if self.damaged_bytes > 0 {
            return self.rewrite();
        }
        self.cut_tail(&file)?;
        file.unlock()?;
        Ok(file)
    }

    /// Maps and looks through what the file has beyond what has been seen. The caller holds its lock.
    fn read_on(&mut self, file: &File) -> io::Result<()> {
        if file.metadata()?.len() <= self.seen_bytes {
            return Ok(());
        }
        let first = self.parts.last().map_or(0, |part| part.first + part.bytes.len() as u64);
        let part = Part { first, ..Part::map(file, self.seen_bytes)? };
        let first_line = if self.parts.is_empty() { self.first_line.as_bytes() } else { &[] };
        let known = part.bytes.starts_with(first_line);
        let mut entries = Entries::new(&part.bytes, if known { first_line.len() } else { 0 });
        let mut windows = Windows::new(&part);
        while let Some((key, place)) = entries.next() {
            // of two the later one: the first was found damaged
            self.index.insert(key, first + place.start as u64);
            windows.seen(entries.end);
        }
        self.damaged_bytes += if known || entries.damaged > 0 { entries.damaged } else { part.bytes.len() };
        self.seen_bytes += entries.end as u64;
        part.release();
        self.parts.push(part);
        Ok(())
    }

    /// Takes off what a process that was killed had begun to write. Nobody has seen an entry there. The caller holds the lock.
    fn cut_tail(&mut self, file: &File) -> io::Result<()> {
        if file.metadata()?.len() > self.seen_bytes {
            file.set_len(self.seen_bytes)?;
        }
        Ok(())
    }

    /// Puts a file of the whole entries alone in the place of a damaged one. A process that has the old one open goes on
    /// with that: what it appends is encoded again another time.
    fn rewrite(&mut self) -> io::Result<File> {
        let (beside, _) = make_beside(&self.path, |beside| File::create_new(beside)).map_err(io::Error::other)?;
        let mut file = OpenOptions::new().read(true).append(true).open(&beside)?;
        let mut entries: Vec<u64> = self.index.values().copied().collect();
        entries.sort_unstable();
        let written = (|| {
            let mut out = io::BufWriter::with_capacity(1 << 20, &mut file);
            out.write_all(self.first_line.as_bytes())?;
            for (part, place) in entries.into_iter().filter_map(|start| self.entry(start)) {
                out.write_all(&self.parts[part].bytes[place.bytes()])?;
            }
            out.flush()?;
            drop(out);
            self.seen_bytes = file.metadata()?.len();
            fs::rename(&beside, &self.path)
        })();
        if written.is_err() {
            _ = fs::remove_file(&beside);
        }
        written.map(|()| file)
    }

    /// The tokens kept for `key`; `None` too where they are not those that were written.
    pub fn get(&self, key: &Key) -> Option<Tokens> {
        let (part, place) = self.entry(*self.index.get(key)?)?;
        entry::read(&self.parts[part].bytes, &place)
    }

    /// The part that byte `start` lies in, and the entry that begins there.
    fn entry(&self, start: u64) -> Option<(usize, Place)> {
        let part = self.part_of(start);
        let Part { bytes, first, .. } = &self.parts[part];
        Some((part, entry::at(bytes, (start - first) as usize)?.1))
    }

    fn part_of(&self, start: u64) -> usize {
        self.parts.partition_point(|part| part.first <= start) - 1
    }

    /// Whether something was kept for `key`, damaged or not.
    pub fn has(&self, key: &Key) -> bool {
        self.index.contains_key(key)
    }

    /// Keeps what is not there yet; from then on [`Self::get`] gives it. Also gives what other processes appended meanwhile.
    pub fn append(&mut self, new: &[(Key, Tokens)]) {
        if new.is_empty() {
            return;
        }
        let file = std::mem::replace(&mut self.file, Err(io::ErrorKind::Other.into()));
        self.file = file.and_then(|mut file| self.write(&mut file, new).map(|()| file));
    }

    fn write(&mut self, file: &mut File, new: &[(Key, Tokens)]) -> io::Result<()> {
        file.lock()?;
        self.read_on(file)?;
        self.cut_tail(file)?;
        let mut out = Vec::new();
        let absent = new.iter().filter(|(key, _)| self.get(key).is_none());
        absent.for_each(|(key, tokens)| entry::write(&mut out, key, tokens));
        if let Err(e) = file.write_all(&out) {
            // a full disk: what is half written helps nobody
            _ = file.set_len(self.seen_bytes);
            return Err(e);
        }
        self.read_on(file)?;
        file.unlock()
    }

    /// Gives the pages back that hold these records.
    pub fn release(&self, keys: &[Key]) {
        let starts = keys.iter().filter_map(|key| self.index.get(key));
        let parts: BTreeSet<usize> = starts.map(|&start| self.part_of(start)).collect();
        parts.into_iter().for_each(|part| self.parts[part].release());
    }

    /// Frees what records are found by; none is found any more.
    pub fn forget_keys(&mut self) {
        self.index = HashMap::new();
    }

    /// Gives all pages back.
    pub fn release_all(&self) {
        self.parts.iter().for_each(Part::release);
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why nothing can be kept, where that is so.
    pub fn unwritable(&self) -> Option<&io::Error> {
        self.file.as_ref().err()
    }

    /// Bytes found in it that belong to no record.
    pub fn damaged_bytes(&self) -> usize {
        self.damaged_bytes
    }
}

/// A mapped part of a file.
pub struct Part {
    map: Arc<Mmap>,
    /// Its bytes.
    pub bytes: Bytes,
    /// Bytes of the parts before it.
    first: u64,
}

/// Lets tokens keep the mapping that they lie in.
struct Owner(Arc<Mmap>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Part {
    /// What `file` has from byte `start` on.
    pub fn map(file: &File, start: u64) -> io::Result<Self> {
        // SAFETY: the mapping is read-only. tunehost never changes an entry of the cache and shortens a file only behind its
        // last whole entry, which nobody reads: it appends, or puts another file in its place. Every entry that is read is
        // checked against its checksum.
        #[allow(unsafe_code)]
        let map = Arc::new(unsafe { MmapOptions::new().offset(start).map(file) }?);
        let bytes = Bytes::from_owner(Owner(map.clone()));
        Ok(Self { map, bytes, first: 0 })
    }

    fn release(&self) {
        release_pages(&self.map, 0, self.map.len());
    }
}

/// Gives pages back while a part is looked through, so that it is never in memory as a whole.
pub struct Windows<'a> {
    part: &'a Part,
    start: usize,
}

impl<'a> Windows<'a> {
    /// At the part's beginning.
    pub fn new(part: &'a Part) -> Self {
        Self { part, start: 0 }
    }

    /// Everything before `end` has been seen.
    pub fn seen(&mut self, end: usize) {
        if end - self.start > WINDOW_BYTES {
            release_pages(&self.part.map, self.start, end - self.start);
            self.start = end;
        }
    }
}
