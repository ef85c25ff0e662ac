//! The block types of ggml that a GGUF file stores weights in: their layout, and the values that blocks stand for.

use half::f16;
use safetensors::Dtype;

/// Values of a super-block.
const SUPER: usize = 256;

/// A block type. A row of a tensor is a whole number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Block {
    /// 32 values: f16 scale, signed bytes.
    Q8_0,
    /// 32 values: f16 scale, five bits each, 16 subtracted.
    Q5_0,
    /// 32 values: f16 scale and offset, five bits each.
    Q5_1,
    /// 256 values: f16 scales of the scales and offsets of eight sub-blocks (six bits each), four bits each.
    Q4K,
    /// As [`Block::Q4K`] with five bits each.
    Q5K,
    /// 256 values: f16 scale of the scales of sixteen sub-blocks (signed bytes), six bits each, 32 subtracted.
    Q6K,
}

impl Block {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Q8_0, Self::Q5_0, Self::Q5_1, Self::Q4K, Self::Q5K, Self::Q6K];

    /// As ggml calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "Q8_0",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Its number in a GGUF file.
    pub fn id(self) -> u32 {
        match self {
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
        }
    }

    /// Values of a block.
    pub fn values(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => SUPER,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => 34,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// The values of whole blocks.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let mut out = Vec::with_capacity(bytes.len() / self.bytes() * self.values());
        for block in bytes.chunks_exact(self.bytes()) {
            match self {
                Self::Q8_0 => {
                    let scale = half(block, 0);
                    out.extend(block[2..].iter().map(|&code| scale * f32::from(code as i8)));
                }
                Self::Q5_0 => {
                    let scale = half(block, 0);
                    out.extend(five_bits(&block[2..]).map(|code| scale * (f32::from(code) - 16.0)));
                }
                Self::Q5_1 => {
                    let (scale, offset) = (half(block, 0), half(block, 2));
                    out.extend(five_bits(&block[4..]).map(|code| scale * f32::from(code) + offset));
                }
                Self::Q4K | Self::Q5K => {
                    let (scale, offset) = (half(block, 0), half(block, 2));
                    let (high, low) = block[16..].split_at(if self == Self::Q5K { SUPER / 8 } else { 0 });
                    for (sub, (scales, offsets)) in unpack_sixes(&block[4..16]).into_iter().enumerate() {
                        let (scale, offset) = (scale * f32::from(scales), offset * f32::from(offsets));
                        let fifth = |at: usize| high.get(at).map_or(0, |bits| bits >> sub & 1);
                        let low = &low[sub / 2 * 32..][..32];
                        let code = |at: usize| (low[at] >> (sub % 2 * 4) & 15) | fifth(at) << 4;
                        out.extend((0..32).map(|at| scale * f32::from(code(at)) - offset));
                    }
                }
                Self::Q6K => {
                    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
                    let scale = half(block, 208);
                    for at in 0..SUPER {
                        let (low, shift) = (low[at / 128 * 64 + at % 64], at % 128 / 64 * 4);
                        let upper = high[at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3;
                        let code = (low >> shift & 15) | upper << 4;
                        out.push(scale * f32::from(scales[at / 16] as i8) * (f32::from(code) - 32.0));
                    }
                }
            }
        }
        out
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// 32 codes: their fifth bits in four bytes, then the low four of the first and second half side by side.
fn five_bits(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    let fifth = |at: usize| bytes[at / 8] >> (at % 8) & 1;
    (0..32).map(move |at| (bytes[4 + at % 16] >> (at / 16 * 4) & 15) | fifth(at) << 4)
}

/// Scale and offset of eight sub-blocks, six bits each in twelve bytes: the low six bits of bytes 0 to 3 are the first four
/// scales, of bytes 4 to 7 the first four offsets; the others have their low four bits in bytes 8 to 11 (scale low, offset
/// high) and their upper two in the upper bits of bytes 0 to 3 and 4 to 7.
pub fn unpack_sixes(bytes: &[u8]) -> [(u8, u8); 8] {
    std::array::from_fn(|sub| match sub {
        0..4 => (bytes[sub] & 63, bytes[sub + 4] & 63),
        _ => {
            let low = bytes[sub + 4];
            (low & 15 | bytes[sub - 4] >> 6 << 4, low >> 4 | bytes[sub] >> 6 << 4)
        }
    })
}

/// What [`unpack_sixes`] reads.
pub fn pack_sixes(pairs: [(u8, u8); 8]) -> [u8; 12] {
    let mut bytes = [0; 12];
    for (sub, (scale, offset)) in pairs.into_iter().enumerate() {
        match sub {
            0..4 => (bytes[sub], bytes[sub + 4]) = (scale, offset),
            _ => {
                bytes[sub + 4] = scale & 15 | (offset & 15) << 4;
                bytes[sub - 4] |= scale >> 4 << 6;
                bytes[sub] |= offset >> 4 << 6;
            }
        }
    }
    bytes
}

/// How the values of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// One by one.
    Plain(Dtype),
    /// In blocks, in a GGUF file alone.
    Blocks(Block),
}

impl Stored {
    /// As files call it.
    pub fn name(self) -> String {
        match self {
            Self::Plain(dtype) => format!("{dtype:?}"),
            Self::Blocks(block) => block.name().into(),
        }
    }

    /// Its number in a GGUF file; none for a dtype that a model's file does not have there.
    pub fn ggml_id(self) -> Option<u32> {
        match self {
            Self::Plain(Dtype::F32) => Some(0),
            Self::Plain(Dtype::F16) => Some(1),
            Self::Plain(Dtype::BF16) => Some(30),
            Self::Plain(_) => None,
            Self::Blocks(block) => Some(block.id()),
        }
    }

    /// What [`Stored::ggml_id`] numbers.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        let plain = [Dtype::F32, Dtype::F16, Dtype::BF16].map(Self::Plain);
        plain.into_iter().chain(Block::ALL.map(Self::Blocks)).find(|stored| stored.ggml_id() == Some(id))
    }

    /// Values that are stored together.
    pub fn block_values(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Blocks(block) => block.values(),
        }
    }

    /// Bytes of a tensor of this shape.
    pub fn size_bytes(self, shape: &[usize]) -> usize {
        let elements = shape.iter().product::<usize>();
        match self {
            Self::Plain(dtype) => elements * dtype.bitsize() / 8,
            Self::Blocks(block) => elements / block.values() * block.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::fixture;

    #[test]
    fn blocks_are_read_as_others_read_them() {
        let golden = std::fs::read(fixture("ggml.safetensors")).unwrap();
        let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
        for block in Block::ALL {
            let part = |part: &str| golden.tensor(&format!("{}.{part}", block.name())).unwrap();
            let blocks = part("blocks");
            assert_eq!(blocks.shape()[1], block.bytes(), "{block:?}");
            let values: Vec<f32> =
                part("values").data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            assert_eq!(block.decode(blocks.data()), values, "{block:?}");
        }
    }

    #[test]
    fn sixes_are_unpacked_as_they_were_packed() {
        let pairs = std::array::from_fn(|sub| (60 - 7 * sub as u8, 3 + 8 * sub as u8));
        assert_eq!(unpack_sixes(&pack_sixes(pairs)), pairs);
    }
}
