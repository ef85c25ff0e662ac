//! A GGUF file, written tensor after tensor.

use super::PendingFolder;
use super::tensor::ExportTensor;
use crate::error::{Error, Result};
use crate::model::gguf::{ALIGNMENT, Value, head};
use safetensors::View;
use std::fs::File;
use std::io::{BufWriter, Write};

/// Bytes that are gathered before they are written.
const BUFFER_BYTES: usize = 1 << 20;

/// What a file of `tensors` with `metadata` begins with. Keys are sorted, so that the same model gives the same bytes.
pub fn head_of(mut metadata: Vec<(String, Value)>, tensors: &[(String, ExportTensor)]) -> Vec<u8> {
    metadata.sort_by(|a, b| a.0.cmp(&b.0));
    let listed: Vec<_> =
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec(), tensor.stored_as())).collect();
    head(&metadata, &listed)
}

/// Writes `tensors` behind their `head` to the file `name` of `folder`; `written` is told the bytes of each.
///
/// # Errors
/// Class `io`.
pub fn write(
    folder: &PendingFolder,
    name: &str,
    head: &[u8],
    tensors: &[(String, ExportTensor)],
    written: &mut dyn FnMut(usize),
) -> Result<()> {
    let path = folder.temporary().join(name);
    let mut write = || {
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, File::create_new(&path)?);
        out.write_all(head)?;
        for (_, tensor) in tensors {
            tensor.write_to(&mut out)?;
            let bytes = tensor.data_len();
            out.write_all(&[0; ALIGNMENT][..bytes.next_multiple_of(ALIGNMENT) - bytes])?;
            written(bytes);
        }
        out.flush()
    };
    write().map_err(|e| Error::io("write", &path, e))
}
