//! Where the tensors of the adapters lie in flat buffers: one buffer holds the adapters, one their gradient, one each of AdamW's moments,
//! and all have the same layout.

use super::adapter::{LowRank, peft_names};
use super::lora::LoraPlan;
use crate::error::Result;
use burn::tensor::{Device, Tensor, TensorData};
use std::ops::Range;
use std::sync::Arc;
use tunehost_kernels::adamw::{Step, Write, adamw, squares, write};

/// Every tensor begins at a multiple of so many values, at which a view of it needs no copy on a device: 512 bytes, the largest
/// alignment that one asks for. There, one whose length is no such multiple is copied where it is read.
const ALIGNMENT: usize = 128;

/// A tensor's place.
#[derive(Debug, PartialEq)]
pub struct Place {
    /// Its PEFT name.
    pub name: String,
    /// Its first value.
    pub start: usize,
    /// Its shape; it lies in row-major order.
    pub shape: [usize; 2],
}

impl Place {
    /// Its values.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape[0] * self.shape[1]
    }
}

/// The places of A and B of each module, in the order of [`LoraPlan::modules`].
#[derive(Debug, PartialEq)]
pub struct Layout {
    modules: Vec<[Place; 2]>,
    /// Values of a buffer; those between the tensors are zero.
    len: usize,
}

impl Layout {
    /// That of the adapters of `plan`.
    pub fn new(plan: &LoraPlan) -> Self {
        let mut len = 0;
        let mut place = |name: String, shape: [usize; 2]| {
            let place = Place { name, start: len, shape };
            len = place.range().end.next_multiple_of(ALIGNMENT);
            place
        };
        let mut modules = Vec::with_capacity(plan.modules.len());
        for module in &plan.modules {
            let [a, b] = peft_names(module);
            modules.push([place(a, [plan.rank, module.input]), place(b, [module.output, plan.rank])]);
        }
        Self { modules, len }
    }

    fn places(&self) -> impl Iterator<Item = &Place> {
        self.modules.iter().flatten()
    }
}

/// A buffer of one value for each parameter, f32.
#[derive(Debug, Clone)]
pub struct Flat {
    layout: Arc<Layout>,
    /// `[len]`.
    values: Tensor<1>,
}

impl Flat {
    /// A buffer for the adapters of `plan` with the values of A and B that `read` gives for each module, by its index and their places.
    ///
    /// # Errors
    /// Those of `read`.
    ///
    /// # Panics
    /// If `read` gives another number of values than a shape asks for.
    pub fn read(
        plan: &LoraPlan,
        device: &Device,
        read: impl FnMut(usize, &[Place; 2]) -> Result<[Vec<f32>; 2]>,
    ) -> Result<Self> {
        Self::laid_out(Layout::new(plan).into(), device, read)
    }

    /// Another buffer like this one, with values as in [`Flat::read`].
    ///
    /// # Errors
    /// Those of `read`.
    ///
    /// # Panics
    /// As [`Flat::read`].
    pub fn read_like(&self, read: impl FnMut(usize, &[Place; 2]) -> Result<[Vec<f32>; 2]>) -> Result<Self> {
        Self::laid_out(self.layout.clone(), &self.values.device(), read)
    }

    fn laid_out(
        layout: Arc<Layout>,
        device: &Device,
        mut read: impl FnMut(usize, &[Place; 2]) -> Result<[Vec<f32>; 2]>,
    ) -> Result<Self> {
        let mut values = vec![0.0; layout.len];
        for (index, places) in layout.modules.iter().enumerate() {
            for (place, of_tensor) in places.iter().zip(read(index, places)?) {
                values[place.range()].copy_from_slice(&of_tensor);
            }
        }
        let shape = [layout.len];
        Ok(Self { layout, values: Tensor::from_data(TensorData::new(values, shape), device) })
    }

    /// Zeros in a buffer like this one.
    pub fn zeros_like(&self) -> Self {
        Self { layout: self.layout.clone(), values: self.values.zeros_like() }
    }

    /// A and B of module `index`: views, while which live nobody changes the buffer in place.
    pub fn pair(&self, index: usize) -> LowRank {
        let [a, b] = &self.layout.modules[index];
        LowRank { a: self.view(a), b: self.view(b) }
    }

    /// Every tensor with its PEFT name, A before B, in module order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, Tensor<2>)> {
        self.layout.places().map(|place| (place.name.as_str(), self.view(place)))
    }

    fn view(&self, place: &Place) -> Tensor<2> {
        self.values.clone().slice([place.range()]).reshape(place.shape)
    }

    /// Writes A and B of module `index` to their place, or adds to what is there.
    ///
    /// # Panics
    /// If they are of another shape.
    pub fn write(&mut self, index: usize, pair: LowRank, how: Write) {
        let layout = self.layout.clone();
        for (place, tensor) in layout.modules[index].iter().zip([pair.a, pair.b]) {
            assert_eq!(tensor.dims(), place.shape, "{}", place.name);
            self.values = write(self.take(), place.start, tensor, how);
        }
    }

    /// Updates the buffer and its `moments` by `gradient`, of which those between the tensors stay zero: in place where nobody else holds
    /// them.
    pub fn update(&mut self, [m, v]: &mut [Self; 2], gradient: Self, step: &Step) {
        let state = [self.take(), m.take(), v.take()];
        [self.values, m.values, v.values] = adamw(state, gradient.values, step);
    }

    /// The buffer, so that nobody else holds it; an empty one stands in until it is put back.
    fn take(&mut self) -> Tensor<1> {
        std::mem::replace(&mut self.values, Tensor::empty([0], &Device::flex()))
    }

    /// The sum of squares of A and of B of each module.
    pub fn squares(&self) -> Vec<[f64; 2]> {
        let parts: Vec<_> = self.layout.places().map(Place::range).collect();
        let sums = squares(self.values.clone(), &parts);
        sums.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LoraConfig;
    use crate::model::adapter::{Adapter, values};
    use crate::model::fixtures::large_model_headers;
    use crate::model::spec::ModelSpec;

    fn plan(rank: usize) -> LoraPlan {
        let (config, found) = large_model_headers();
        let spec = ModelSpec::check(&config, &found).unwrap().0;
        LoraPlan::new(&LoraConfig { rank, ..LoraConfig::default() }, &spec).unwrap()
    }

    #[test]
    fn tensors_lie_in_module_order_at_the_alignment_and_a_real_run_has_no_padding() {
        let layout = Layout::new(&plan(64));
        assert_eq!((layout.modules.len(), layout.len), (205, 74_342_400));
        for rank in [1, 3, 8] {
            let layout = Layout::new(&plan(rank));
            let mut end = 0usize;
            for place in layout.places() {
                assert_eq!(place.start, end.next_multiple_of(ALIGNMENT), "{}", place.name);
                end = place.range().end;
            }
            assert_eq!(layout.len, end.next_multiple_of(ALIGNMENT));
        }
    }

    #[test]
    fn a_pair_is_written_to_its_place_alone_and_padding_stays_zero() {
        let adapter = Adapter::init(plan(1), 3, &Device::flex());
        let mut sum = adapter.flat.zeros_like();
        sum.write(7, adapter.pair(7), Write::Set);
        sum.write(7, adapter.pair(7), Write::Add);
        for index in [6, 8] {
            assert!(values(&sum.pair(index).a).iter().all(|v| *v == 0.0));
        }
        let doubled: Vec<f32> = values(&adapter.pair(7).a).iter().map(|v| 2.0 * v).collect();
        assert_eq!(values(&sum.pair(7).a), doubled);
        let in_tensors: f64 = sum.squares().iter().flatten().sum();
        let of_all: f64 = values(&sum.values).iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        assert!(in_tensors > 0.0 && (in_tensors - of_all).abs() < 1e-12 * of_all);
    }
}
